//go:build unix

package socket_test

import (
	"context"
	"fmt"
	"os"
	"path/filepath"

	"tunnel.example/tunnel/pkg/socket"
)

// Only our own user may connect. Close removes the file.
func ExampleListen() {
	dir, err := os.MkdirTemp("", "socket")
	if err != nil {
		fmt.Println(err)
		return
	}
	defer os.RemoveAll(dir)
	path := filepath.Join(dir, "cloud.sock")

	ln, err := socket.Listen(context.Background(), path)
	if err != nil {
		fmt.Println(err)
		return
	}
	info, err := os.Stat(path)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(info.Mode())
	ln.Close()
	_, err = os.Stat(path)
	fmt.Println("removed:", os.IsNotExist(err))
	// Output:
	// Srw-------
	// removed: true
}
