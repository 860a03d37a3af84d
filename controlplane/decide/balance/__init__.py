"""How sessions are spread over the nodes in service: weights, zones, and moves that even out the load."""
