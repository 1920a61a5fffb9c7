"""Options of the commands and of the library's functions, each stated once."""
