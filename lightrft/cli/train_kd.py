"""The command ``lightrft kd``, for ``torchrun -m lightrft.cli.train_kd``."""
from lightrft.cli.offline import OFFLINE

main = OFFLINE["kd"].main

if __name__ == "__main__":
    main()
