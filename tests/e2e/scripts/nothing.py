"""Ends well at once."""
