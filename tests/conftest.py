"""What all tests share."""

from hypothesis import settings

# Examples have no deadline of their own: a busy machine is no bug.
settings.register_profile("house", deadline=None)
settings.load_profile("house")
