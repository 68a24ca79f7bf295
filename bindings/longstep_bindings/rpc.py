"""Remote calls between two processes: exactly once, in order within a session, with deadlines both sides keep.

A `Service` is what a server offers: named methods that get a `Call`. A `Server` serves it at an address; a `Client` calls
it. PROTOCOL.md specifies what travels.

    with Server(service) as server, Client(server.address, service=service.name, version=1) as client:
        client.call("add", 3, timeout_s=5.0)
"""

from longstep_bindings.calls import LATER, Call, Service, Session
from longstep_bindings.client import Client
from longstep_bindings.limits import Limits
from longstep_bindings.pending import Pending
from longstep_bindings.server import Server
from longstep_bindings.terms import Terms

__all__ = ["LATER", "Call", "Client", "Limits", "Pending", "Server", "Service", "Session", "Terms"]
