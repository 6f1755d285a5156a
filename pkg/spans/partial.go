package spans

import "google.golang.org/protobuf/encoding/protowire"

// rejectedBy returns how many spans of a batch of most spans the collector has rejected. Its answer says so: OTLP's
// message ExportTraceServiceResponse has partial_success as field 1, and that has rejected_spans as field 1. The
// package of OTLP with these messages would bring grpc-gateway along. 0: none, or the answer is no such message.
func rejectedBy(answer []byte, most int) int {
	partial, _ := protowire.ConsumeBytes(fieldOne(answer, protowire.BytesType))
	rejected, _ := protowire.ConsumeVarint(fieldOne(partial, protowire.VarintType))
	return int(min(rejected, uint64(most))) //nolint:gosec // from 0 to most
}

// fieldOne returns the last field of a message that has the number 1 and a type; nil: there is none.
func fieldOne(message []byte, want protowire.Type) (value []byte) {
	for len(message) > 0 {
		number, typ, size := protowire.ConsumeTag(message)
		if size < 0 {
			return nil
		}
		message = message[size:]
		if size = protowire.ConsumeFieldValue(number, typ, message); size < 0 {
			return nil
		}
		if number == 1 && typ == want {
			value = message[:size]
		}
		message = message[size:]
	}
	return value
}
