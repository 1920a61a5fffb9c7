"""What the command line prints: a module for each screen, and one for figures and tables."""
