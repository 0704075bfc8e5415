"""perfed on Flower: the same rounds and methods, with the clients on other processes or machines.

An adapter and nothing else: tasks go out as Flower messages and replies come back. In a Flower project of your own,

    [tool.flwr.app.components]
    serverapp = "perfed.flower.server_app:app"
    clientapp = "perfed.flower.client_app:app"

`perfed.flower.strategy.Strategy` is the same as a Flower Strategy.
"""
