package conf_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"tunnel.example/tunnel/conf"
)

// All mistakes of a file are reported at once, each with its line and its correction.
func ExampleReadEdge() {
	dir, err := os.MkdirTemp("", "conf")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "edge.toml")
	const text = `[mode.edge]
node = "edge_1"
[mode.edge.stream.client]
servername = "tunnel.example.com:9000"
logports = 7000
`
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		fmt.Println(err)
		return
	}

	_, err = conf.ReadEdge(path, conf.Env{})
	problems, _ := errors.AsType[conf.Problems](err)
	for _, p := range problems {
		fmt.Printf("line %d: %s: %s\n", p.Line, p.Key, p.Text)
	}
	// Output:
	// line 2: mode.edge.node: node name "edge_1" is not an RFC 1123 subdomain: use lower-case letters, digits, '-' and '.'
	// line 5: mode.edge.stream.client.logports: unknown key: did you mean logport?
}
