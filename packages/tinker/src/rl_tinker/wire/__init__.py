"""Wire format of the API: protobuf messages, decoded into rows and encoded from results."""
