"""The command ``lightrft dpo``, for ``torchrun -m lightrft.cli.train_dpo``."""
from lightrft.cli.offline import OFFLINE

main = OFFLINE["dpo"].main

if __name__ == "__main__":
    main()
