"""What the layers of a model see when it runs on data: the metrics that fitting minimises in."""
