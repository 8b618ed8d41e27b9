"""The command ``lightrft kto``, for ``torchrun -m lightrft.cli.train_kto``."""
from lightrft.cli.offline import OFFLINE

main = OFFLINE["kto"].main

if __name__ == "__main__":
    main()
