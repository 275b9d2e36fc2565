"""The processes of `jdelta demo`: a trainer, followers, and what they share."""
