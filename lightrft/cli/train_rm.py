"""The command ``lightrft rm``, for ``torchrun -m lightrft.cli.train_rm``."""
from lightrft.cli.offline import OFFLINE

main = OFFLINE["rm"].main

if __name__ == "__main__":
    main()
