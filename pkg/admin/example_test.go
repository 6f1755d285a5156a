package admin_test

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"time"

	"tunnel.example/tunnel/pkg/admin"
	"tunnel.example/tunnel/pkg/tunnel"
)

// A probe learns which module is not ready.
func Example() {
	reg := admin.NewRegistry("v1.2.3", new(tunnel.Counters), new(tunnel.Directory).Sessions)
	health := admin.New("127.0.0.1:0", []admin.Check{
		{Name: "stream", Ready: func() error { return nil }},
		{Name: "tcp", Ready: func() error { return errors.New("tcp listeners are not open") }},
	}, reg, slog.New(slog.DiscardHandler))
	ctx, stop := context.WithTimeout(context.Background(), time.Minute)
	defer stop()
	ended := make(chan error, 1)
	go func() { ended <- health.Run(ctx) }()
	for health.Addr() == nil {
		select {
		case err := <-ended:
			fmt.Println("it does not listen:", err)
			return
		case <-time.After(time.Millisecond):
		}
	}

	client := &http.Client{Transport: &http.Transport{DisableKeepAlives: true}}
	res, err := client.Get("http://" + health.Addr().String() + "/readyz")
	if err != nil {
		fmt.Println(err)
		return
	}
	text, err := io.ReadAll(res.Body)
	res.Body.Close()
	fmt.Println(res.Status, err)
	fmt.Print(string(text))

	stop()
	fmt.Println(<-ended)
	// Output:
	// 503 Service Unavailable <nil>
	// [+]stream ok
	// [-]tcp tcp listeners are not open
	// readyz check failed
	// <nil>
}
