"""The constructor fields of torch's layers: read back, checked, passed between a layer and its twin."""
