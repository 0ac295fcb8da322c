"""The constructor fields of torch's layers: read back, checked, handed on."""
