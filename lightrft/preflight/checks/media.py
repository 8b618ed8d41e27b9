"""Checks of what a model that sees or hears needs: the packages that decode its media, and its processor."""
from collections.abc import Iterator
from importlib import import_module

from lightrft.config.schema import Config
from lightrft.preflight.checks import Finding
from lightrft.preflight.checks.packages import installed
from lightrft.utils.errors import first_line, install_command

# module, distribution, extra, and what is read without it (empty: nothing)
Package = tuple[str, str, str, str]
PACKAGES: dict[str, tuple[Package, ...]] = {
    "image": (("PIL", "pillow", "vl", ""), ("torchvision", "torchvision", "vl", "")),
    "video": (("av", "av", "video", "animated GIF, WebP and PNG, and lists of pictures"), ),
    "audio": (("soundfile", "soundfile", "audio", "PCM and float WAV"),
              ("soxr", "soxr", "audio", "sounds at the rate of the model")),
}  # yapf: disable


def check_media(config: Config) -> Iterator[Finding]:
    """Yield one finding per package that the kinds of media of the model need, and one for its processor; none for a
    model that takes text only."""
    path = config.model.pretrain
    if not path:
        return
    from lightrft.datasets.media_store import open_store
    from lightrft.models.loader import media_kinds, token_frames
    from lightrft.models.tokenizer import load_tokenizer
    kinds = media_kinds(path)
    packages = [package for kind in kinds for package in PACKAGES[kind]]
    if packages and PACKAGES["image"][0] not in packages:
        packages = [*PACKAGES["image"][:1], *packages]  # Pillow, which the reader of rows imports
    yield from map(check_package, packages)
    if kinds:
        store = open_store(path, load_tokenizer(path), config.data, token_frames(path), kinds)
        yield Finding("ok", "media", f"{', '.join(kinds)}, processed by {type(store.processor).__name__}")


def check_package(package: Package) -> Finding:
    """Import a package. A missing one fails the run if nothing of its kind can be read without it."""
    module, name, extra, without = package
    try:
        import_module(module)
    except (ImportError, OSError, RuntimeError) as error:
        reason = f"{first_line(error)}" + (f"; without it only {without} can be read" if without else "")
        return Finding("warn" if without else "fail", name, f"cannot be imported: {reason}", install_command(extra))
    return Finding("ok", name, f"{installed(name) or 'installed'}, for {extra if extra != 'vl' else 'pictures'}")
