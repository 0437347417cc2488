"""The response cache: answers given lately, given again."""
