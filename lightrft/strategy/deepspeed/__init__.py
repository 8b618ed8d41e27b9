"""DeepSpeed ZeRO; the package deepspeed is imported by :mod:`lightrft.strategy.deepspeed.backend` alone."""
