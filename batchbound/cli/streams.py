"""Standard output and error, of :mod:`..screen.streams`."""

from ..screen.streams import escaped as escaped
from ..screen.streams import output_lost as output_lost
from ..screen.streams import prepare_streams as prepare_streams
from ..screen.streams import say as say
