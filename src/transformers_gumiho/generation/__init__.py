"""The generation loop: draft a tree, verify it with the target, commit the accepted path."""
