"""Where a checkpoint is, and how a new one takes the place of the one before without either ever being lost."""

from __future__ import annotations

import os
import posixpath
import shutil
from pathlib import Path
from typing import Any

import torch
from fsspec.core import url_to_fs
from fsspec.implementations.local import LocalFileSystem

META = "meta.pt"  # in a sharded checkpoint what is neither weights nor optimizer state, as Lightning names it


class Place:
    """A path or an fsspec URL at which there is, or will be, a checkpoint: one file, or a folder with shards.

    A checkpoint is written to :attr:`target`, between :meth:`prepare` and :meth:`complete`. A process killed at any
    moment of that leaves the new checkpoint or the one before where :meth:`found` finds it.
    On a local filesystem the target is a hidden neighbour, renamed when complete. Elsewhere renaming is copying: the
    previous checkpoint is moved aside first, and a folder counts as a checkpoint once it has ``meta.pt``.
    """

    def __init__(self, url: str | os.PathLike[str]) -> None:
        self._fs, self._path = url_to_fs(os.fspath(url))
        self._local = isinstance(self._fs, LocalFileSystem)

    @property
    def id(self) -> Path | str:
        """What names this place for others: a path, or a URL where the filesystem is not local."""
        return Path(self._path) if self._local else str(self._fs.unstrip_protocol(self._path))

    @property
    def target(self) -> Place:
        """Where a checkpoint for this place is to be written."""
        return self._beside(f".{self._name}.new") if self._local else self

    @property
    def meta(self) -> Place:
        """The file of a folder that is written last."""
        return self._at(posixpath.join(self._path, META))

    @property
    def is_folder(self) -> bool:
        """Whether there is a folder here."""
        return bool(self._fs.isdir(self._path))

    def open(self, mode: str):  # type: ignore[no-untyped-def]  # fsspec has no types
        """Open the file here."""
        return self._fs.open(self._path, mode)

    def load(self, weights_only: bool | None) -> dict[str, Any]:
        """Return what ``torch.save`` wrote to the file here, on the host; ``weights_only`` as in ``torch.load``."""
        contents: dict[str, Any]
        if self._local:  # mapped: each rank reads only what it needs
            contents = torch.load(self._path, map_location="cpu", mmap=True, weights_only=weights_only)
        else:
            with self.open("rb") as file:
                contents = torch.load(file, map_location="cpu", weights_only=weights_only)
        return contents

    def found(self) -> Place | None:
        """Return where the checkpoint is: here, or aside when writing here was interrupted; None without any."""
        return next((place for place in (self, self._aside) if place._is_complete), None)

    def prepare(self, folder: bool) -> None:
        """Make :attr:`target` free for a folder or a file.

        Raises:
            IsADirectoryError: a file cannot go here, since there is a folder with other things than a checkpoint.
        """
        if not folder and (others := self._others):
            raise IsADirectoryError(f"{self.id} is a folder with other files than a checkpoint's, such as {others[0]}.")
        self._fs.makedirs(posixpath.dirname(self._path), exist_ok=True)
        if self._local:
            self.target.remove()
        else:
            self._set_aside()

    def complete(self) -> None:
        """Put what is in :attr:`target` here and remove what was here before."""
        if self._local:
            try:
                os.replace(self.target._path, self._path)
            except OSError:  # a folder is replaced by nothing, and replaces nothing but an empty one
                self._set_aside()
                os.replace(self.target._path, self._path)
        for name in self._aside._others:
            self._fs.mv(posixpath.join(self._aside._path, name), posixpath.join(self._path, name), recursive=True)
        self._aside.remove()

    def remove(self) -> None:
        """Remove what is here, if anything; a link without what it points to."""
        if not self._exists:
            return
        if not self._local:
            self._fs.rm([p._path for p in (self.meta, self) if p._exists], recursive=True)
        elif self.is_folder and not os.path.islink(self._path):
            # Renamed first: what is partly removed must not look like a checkpoint.
            gone = self._beside(f".{self._name}.gone")
            shutil.rmtree(gone._path, ignore_errors=True)
            os.rename(self._path, gone._path)
            shutil.rmtree(gone._path)
        else:
            os.remove(self._path)

    @property
    def _name(self) -> str:
        return posixpath.basename(self._path)

    @property
    def _aside(self) -> Place:
        # Trainer(ckpt_path="last") looks for names that start with "last" and end with ".ckpt".
        stem, suffix = posixpath.splitext(self._name)
        return self._beside(f"{stem}.old{suffix}")

    @property
    def _exists(self) -> bool:
        return bool(self._fs.lexists(self._path))

    @property
    def _is_complete(self) -> bool:
        return bool(self._fs.isfile(self._path) or self._fs.isfile(self.meta._path))

    @property
    def _others(self) -> list[str]:
        """Names in the folder here that belong to no checkpoint."""
        if not self.is_folder or (self._local and os.path.islink(self._path)):
            return []
        names = [posixpath.basename(name.rstrip("/")) for name in self._fs.ls(self._path, detail=False)]
        return sorted(n for n in names if n not in (META, ".metadata") and not n.endswith(".distcp"))

    def _at(self, path: str) -> Place:
        return Place(path if self._local else self._fs.unstrip_protocol(path))

    def _beside(self, name: str) -> Place:
        return self._at(posixpath.join(posixpath.dirname(self._path), name))

    def _set_aside(self) -> None:
        aside = self._aside
        if not self._exists:
            return
        if aside._exists and not self._is_complete:  # writing here was interrupted; the checkpoint before is aside
            self.remove()
            return
        aside.remove()
        if self._local:
            os.rename(self._path, aside._path)
        else:
            self._copy_to(aside)
            self.remove()

    def _copy_to(self, other: Place) -> None:
        files = self._fs.find(self._path) if self.is_folder else [self._path]
        for path in sorted(files, key=lambda path: path == self.meta._path):
            self._fs.makedirs(posixpath.dirname(other._path + path[len(self._path) :]), exist_ok=True)
            self._fs.cp_file(path, other._path + path[len(self._path) :])
