"""The command ``lightrft grm``, for ``torchrun -m lightrft.cli.train_grm``."""
from lightrft.cli.offline import OFFLINE

main = OFFLINE["grm"].main

if __name__ == "__main__":
    main()
