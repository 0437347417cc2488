"""The response cache: stores recent answers and replays them for equal requests."""
