package rig

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
	"time"
)

// recordEvery is the pause between two looks of Record. The status page asks no more often.
const recordEvery = 2 * time.Second

// Record keeps what a cloud shows, until ctx is done: page-N.json is /data.json of its status page, and metrics-N.txt
// is /metrics. N is the time in milliseconds since 1970. page and health are addresses. A cloud that does not answer
// leaves no file.
func Record(ctx context.Context, dir, page, health string) error {
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return err
	}
	for {
		at := time.Now().UnixMilli()
		for _, one := range []struct{ url, file string }{
			{"http://" + page + "/data.json", fmt.Sprintf("page-%d.json", at)},
			{"http://" + health + "/metrics", fmt.Sprintf("metrics-%d.txt", at)},
		} {
			text, err := get(ctx, one.url)
			if err != nil {
				continue // it is down
			}
			if err = os.WriteFile(filepath.Join(dir, one.file), text, 0o644); err != nil {
				return err
			}
		}
		select {
		case <-time.After(recordEvery):
		case <-ctx.Done():
			return nil
		}
	}
}

// get returns the body of an answer with status 200.
func get(ctx context.Context, url string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(ctx, recordEvery)
	defer cancel()
	r, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return nil, err
	}
	answer, err := http.DefaultClient.Do(r)
	if err != nil {
		return nil, err
	}
	defer answer.Body.Close()
	if answer.StatusCode != http.StatusOK {
		return nil, fmt.Errorf("%s: %s", url, answer.Status)
	}
	return io.ReadAll(answer.Body)
}
