"""The one coordinator of a job: inbox -> decide -> journal -> orders."""
