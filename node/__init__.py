"""A hetnode peer: model, training, data, network and the command line."""
