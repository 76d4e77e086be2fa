"""The connections of a node to the coordinator and to its neighbours."""
