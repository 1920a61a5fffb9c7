"""The compiled searches, and what calls them."""
