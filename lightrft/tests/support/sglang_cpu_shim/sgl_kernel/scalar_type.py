"""Names of number types."""


class _Names:

    def __getattr__(self, name):
        return name


scalar_types = _Names()
