"""What the gateway knows of each kind of server: how to find out what it is, where it tells its load, how a rank is
named to it. One module per kind; `discovery` asks which one a worker is."""
