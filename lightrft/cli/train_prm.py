"""The command ``lightrft prm``, for ``torchrun -m lightrft.cli.train_prm``."""
from lightrft.cli.offline import OFFLINE

main = OFFLINE["prm"].main

if __name__ == "__main__":
    main()
