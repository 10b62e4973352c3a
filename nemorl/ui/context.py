"""What the routes of all screens share."""

from aiohttp import web

from .folders import Folders

FOLDERS = web.AppKey("folders", Folders)
READ_ONLY = web.AppKey("read_only", bool)
