"""Development tools: build the demo model, run tests on a GPU machine, take screenshots."""
