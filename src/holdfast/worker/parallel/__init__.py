"""What is done to models: their communication made repeatable, and put in order after a broken pass."""
