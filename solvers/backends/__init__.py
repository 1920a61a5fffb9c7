"""One neutral linear model handed to each solver library, every one in a process of its own."""
