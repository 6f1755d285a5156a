package stream

import (
	"testing"

	"google.golang.org/protobuf/proto"

	pb "tunnel.example/tunnel/pkg/stream/tunnelv1"
)

// oneMessage is a control stream that holds one message.
type oneMessage struct {
	controlStream
	m *pb.StreamMsg
}

func (o oneMessage) Recv() (*pb.StreamMsg, error) { return o.m, nil }

// Whatever comes first on a control stream is a hello or refused.
func FuzzHello(f *testing.F) {
	for _, hello := range []*pb.Hello{{Version: Version}, {Version: 9, Instance: "x", Reach: "host=a", Have: []string{"a", "b"}, Replica: &pb.Replica{Addrs: []string{"10.0.0.1"}}}} {
		b, err := proto.Marshal(&pb.StreamMsg{Category: category, Type: typeHello, Data: encode(hello)})
		if err != nil {
			f.Fatal(err)
		}
		f.Add(b)
	}
	f.Add([]byte{0x12, 0x06, 's', 't', 'r', 'e', 'a', 'm'})
	f.Fuzz(func(t *testing.T, b []byte) {
		var m pb.StreamMsg
		if proto.Unmarshal(b, &m) != nil {
			return
		}
		hello, err := receiveHello(oneMessage{m: &m})
		if (err == nil) != (hello != nil) {
			t.Fatalf("%v, %v", hello, err)
		}
		if err == nil && (m.GetCategory() != category || m.GetType() != typeHello) {
			t.Fatalf("%s/%s was taken for a hello", m.GetCategory(), m.GetType())
		}
	})
}
