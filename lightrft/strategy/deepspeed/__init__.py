"""DeepSpeed ZeRO; the package deepspeed is imported by :mod:`lightrft.strategy.deepspeed.backend` alone."""

NO_DEEPSPEED = "--strategy deepspeed: the package deepspeed is not installed; run: pip install deepspeed==0.19.8"
