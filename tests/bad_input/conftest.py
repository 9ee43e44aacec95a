"""`pytest tests/bad_input --hypothesis-profile=long` searches for some ten minutes instead of seconds."""

from hypothesis import settings

settings.register_profile("long", settings.get_profile("naju"), derandomize=False, max_examples=700)
