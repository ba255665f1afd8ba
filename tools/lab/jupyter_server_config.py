"""Read by every server that tools/lab.py starts. A file without a write bit is read-only in Lab, whoever runs it.

The system lets root write any file, and Lab would save a record that was only opened: its outputs are a result.
"""

import os
import stat

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
from tornado.web import HTTPError


class WriteProtected(AsyncLargeFileManager):
    def is_writable(self, path: str) -> bool:
        """Lab greys out Save, and does not save by itself, where this is False."""
        place = self._get_os_path(path.strip("/"))
        if os.path.isfile(place) and not os.stat(place).st_mode & (stat.S_IWUSR | stat.S_IWGRP | stat.S_IWOTH):
            return False
        return super().is_writable(path)

    async def save(self, model, path=""):
        if os.path.exists(self._get_os_path(path.strip("/"))) and not self.is_writable(path):
            raise HTTPError(403, f"{path} is a record and write-protected; save under another name (File, Save As)")
        return await super().save(model, path)


c = get_config()  # noqa: F821
c.ServerApp.contents_manager_class = WriteProtected
