"""A fake of SGLang for the tests of serving: only its launcher, which answers over HTTP as 0.5.23 does."""
