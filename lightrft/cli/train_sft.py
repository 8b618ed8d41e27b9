"""The command ``lightrft sft``, for ``torchrun -m lightrft.cli.train_sft``."""
from lightrft.cli.offline import OFFLINE

main = OFFLINE["sft"].main

if __name__ == "__main__":
    main()
