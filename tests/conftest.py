"""What holds for all tests."""

from hypothesis import settings

# By default an example that takes 200 ms fails: on a busy machine that measures the machine.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")
