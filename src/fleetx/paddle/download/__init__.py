"""Data sets from afar: a yaml names a folder, its filelist.txt and meta.txt name what to bring.

downloader   the public calls and their arguments
config       the yaml: where the folder is
listing      filelist.txt and meta.txt, shards, names that stay inside of the folder
remote       what a remote folder can do; web (http, https) and filesystem (everything else that fsspec knows)
fetch        one file: resumed, tried again, its md5 checked
unpack       one tar: beside first, then renamed into place
folder       all of them, into one local folder; records: what that folder remembers
node         one process of a node does the work, the others wait for its outcome
parallel     threads that stop when asked
progress     a bar or a line now and then
failure      what can go wrong
"""

from __future__ import annotations

from fleetx.errors import DownloadError
from fleetx.paddle.download.downloader import Downloader
from fleetx.paddle.download.fetch import Patience

__all__ = ["DownloadError", "Downloader", "Patience"]
