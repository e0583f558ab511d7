"""The commands that show, measure and tune: benchmarks, pictures of draft trees, the page, and pairs with a name."""
