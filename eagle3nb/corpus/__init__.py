"""Tokenised conversations: reading, masks, audit, merge, draft vocabulary. Uses only the base modules."""
