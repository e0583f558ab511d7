"""A web page on which a question is answered with a drafter and without."""
