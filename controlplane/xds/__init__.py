"""The xDS server: turns a plan into resources, sends them to Envoys and tracks acknowledgements."""
