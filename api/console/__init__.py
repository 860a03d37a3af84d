"""The web console: pages made on the server, which refresh themselves where there is JavaScript."""
