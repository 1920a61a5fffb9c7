"""Carries out a command, as ``batchbound`` does."""

import sys

from batchbound.__main__ import command

sys.exit(command())
