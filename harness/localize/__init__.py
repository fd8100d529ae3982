"""Numbers -> the layer, head, phase, position and condition that are wrong, and the name of the bug."""
