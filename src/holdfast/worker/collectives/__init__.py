"""Process groups that stay while what they communicate through is swapped, view by view."""
