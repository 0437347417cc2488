"""Types shared by the server's packages: generations, output events, request events and costs."""
